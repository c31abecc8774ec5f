<?xml version="1.0"?>
<!-- No VM gets more memory than this, whatever its job asks for. The daemon writes MiB. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:variable name="most" select="512"/>

  <xsl:template match="@* | node()">
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy>
  </xsl:template>

  <xsl:template match="/domain/memory[@unit = 'MiB']/text()">
    <xsl:choose>
      <xsl:when test=". &gt; $most"><xsl:value-of select="$most"/></xsl:when>
      <xsl:otherwise><xsl:value-of select="."/></xsl:otherwise>
    </xsl:choose>
  </xsl:template>

  <!-- Other units come from LIBVIRT_XML_SCRIPT or another stage: rather no VM than one too large. -->
  <xsl:template match="/domain/memory[not(@unit = 'MiB')]">
    <xsl:message terminate="yes">the memory of the VM is not given in MiB</xsl:message>
  </xsl:template>
</xsl:stylesheet>
