<?xml version="1.0"?>
<!-- MAC addresses that belong to machines of this site: no job may have them. Lower case, between blanks. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:variable name="forbidden" select="' 52:54:00:00:00:01 52:54:00:00:00:02 '"/>

  <xsl:template match="@* | node()">
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy>
  </xsl:template>

  <xsl:template match="interface/mac">
    <xsl:variable name="address" select="translate(@address, 'ABCDEF', 'abcdef')"/>
    <xsl:if test="contains($forbidden, concat(' ', $address, ' '))">
      <xsl:message terminate="yes">vm_macaddr = <xsl:value-of select="$address"/> belongs to a machine of this site; leave it out</xsl:message>
    </xsl:if>
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy>
  </xsl:template>
</xsl:stylesheet>
