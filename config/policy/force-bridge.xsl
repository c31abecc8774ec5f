<?xml version="1.0"?>
<!-- Every interface is on one bridge, whatever kind of network the job asks for. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:variable name="bridge" select="'br-jobs'"/>

  <xsl:template match="@* | node()">
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy>
  </xsl:template>

  <xsl:template match="devices/interface">
    <interface type="bridge">
      <source bridge="{$bridge}"/>
      <xsl:apply-templates select="mac | model | boot"/>
    </interface>
  </xsl:template>
</xsl:stylesheet>
